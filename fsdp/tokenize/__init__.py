"""Files of text, conversations and pairs as files of tokens. No torch, so that a worker starts quickly.

    locate         a source by its name
    sources        row files of a folder or a pattern; their rows by number
    object_files   row files in an object store
    hub_dataset    a data set of Hugging Face
    tokenizer      a tokenizer by folder, file or id, offline; bytes
    documents      a row as tokens, and which of them are trained on
    conversations  the chat template, and which characters the assistant writes
    shards         the token files, by parallel processes that can be killed
    cache          files made once, for every rank and later runs

Not here: samples of a run (fsdp/data/documents.py).
"""
