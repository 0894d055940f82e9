"""Files of text, conversations and pairs as files of tokens.

    rows            a source by its name: files, a data set of Hugging Face; a cache
    conversations   tokenizers; a row as a document: text, the chat template, what the assistant writes in it
    shards          the token files of a folder, written by processes; a killed start continues
    __main__        the command: python -m fsdp.tokenize

Not here: samples of a run (fsdp/data/documents.py).
"""
