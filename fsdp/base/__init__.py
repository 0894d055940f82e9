"""What every room uses: errors, phases, text, /proc, object stores, digests, private names of torch.

    errors             errors with a HINT and an exit code
    text               counts, units, commands and names as people read them; stdout and stderr
    phases             phases and outcomes as values; the signals that stop a run
    proc               /proc, a limit of memory, garbage collection, the cache folder, files within a size
    object_client      the client of object stores (fsspec, imported by its first use)
    devices            figures of devices, digests and dtypes of tensors, threads for jobs (torch)
    torch_private      every use of a private name of torch (torch)

Standard library only, but for the packages in parentheses.
"""
