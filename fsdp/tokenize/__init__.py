"""Files of text, conversations and pairs as files of tokens. No torch, so that a worker starts quickly.

    sources        which files a name means; their rows by number
    tokenizer      a tokenizer by folder, file or id, offline; bytes
    documents      a row as tokens, and which of them are trained on
    conversations  the chat template, and which characters the assistant writes
    shards         the token files, by parallel processes that can be killed
    cache          files made once, for every rank and later runs

Not here: samples of a run (fsdp/data/documents.py).
"""
