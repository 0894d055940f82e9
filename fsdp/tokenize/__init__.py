"""Files of text, conversations and pairs as files of tokens. No torch, so that a worker starts quickly.

    locate         a source by its name
    sources        row files of a folder or a pattern; their rows by number
    line_rows      lines of JSON; compressed files
    json_rows      lists of rows in a .json file
    parquet_rows   row groups of Parquet
    rows           what a row is
    object_files   row files in an object store
    hub_dataset    a data set of Hugging Face
    tokenizer      a tokenizer by folder, file or id, offline; bytes
    documents      a row as tokens, and which of them are trained on
    conversations  the chat template, and which characters the assistant writes
    shards         the token files of a folder, finished by a start after a killed one
    shard_plan     which rows a shard holds, and what its tokens follow from
    shard_files    the files of one shard
    shard_pool     processes that write shards
    packages       optional packages, imported where a file needs one
    cache          files made once, for every rank and later runs

Not here: samples of a run (fsdp/data/documents.py).
"""
