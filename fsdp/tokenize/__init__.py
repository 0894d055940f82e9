"""Files of text, conversations and pairs as files of tokens. No torch, so that a worker starts quickly.

    locate          a source by its name
    source_names    how a source's name, or a file in its folder, tells what it is
    split_names     files and folders named train, val or test
    file_names      names of files in messages
    sources         row files of a folder or a pattern; their rows by number
    line_rows       lines of JSON; compressed files
    json_rows       lists of rows in a .json file
    parquet_rows    row groups of Parquet
    rows            what a row is
    zero_bytes      zero bytes in a text: what the file looks like, and the line that fixes it
    object_files    row files in an object store
    hub_dataset     a data set of Hugging Face
    tokenizer       a tokenizer by folder, file or id, offline; bytes
    documents       a row as tokens, and which of them are trained on
    conversations   the chat template, and which characters the assistant writes
    shards          the token files of a folder, finished by a start after a killed one
    shard_plan      which rows a shard holds, and what its tokens follow from
    shard_files     the files of one shard
    shard_pool      processes that write shards
    progress        the progress line, and the number of processes
    child           tokenizing in a process of its own, for a run
    without_torch   transformers imported as where torch is absent
    packages        optional packages, imported where a file needs one
    cache           files made once, for every rank and later runs
    __main__        the command: python -m fsdp.tokenize

Not here: samples of a run (fsdp/data/documents.py).
"""
