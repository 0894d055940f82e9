"""Files of text, conversations and pairs as files of tokens.

    rows            a source by its name: files, a data set of Hugging Face, objects in a store; a cache
    conversations   a row as a document: text, the chat template, and what the assistant writes in it
    tokenizer       a tokenizer by folder, file or id, offline; bytes
    shards          the token files of a folder, written by processes; a killed start continues
    __main__        the command: python -m fsdp.tokenize

Not here: samples of a run (fsdp/data/documents.py).
"""
