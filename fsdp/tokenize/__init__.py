"""Files of text, conversations and pairs as files of tokens.

    rows            a source by its name (files, a data set of Hugging Face, objects in a store), and its rows
    conversations   a row as a document: text, the chat template, and which characters the assistant writes
    tokenizer       a tokenizer by folder, file or id, offline; bytes
    shards          the token files of a folder, written by processes; a killed start continues
    cache           files made once, for every rank and later runs
    __main__        the command: python -m fsdp.tokenize

Not here: samples of a run (fsdp/data/documents.py).
"""
