"""What every room uses: errors, phases, text, /proc, object stores, digests, private names of torch.

    errors                         errors with a HINT and an exit code
    text                           counts, units, commands and names as people read them; checked values
    phases                         phases and outcomes as values; the signals that stop a run
    streams                        stdout and stderr that print any text
    proc                           files of /proc, a cgroup's limit, garbage collection, the cache folder
    regular_file                   files that may be anyone's, read within a size; no FIFOs
    object_client                  the client of object stores (fsspec, imported by its first use)
    devices                        figures of devices; a thread for the jobs of an object (torch)
    digest, torchvision_import     digests and dtypes of tensors; import of torchvision (torch)
    torch_private                  every use of a private name of torch; a folder (torch)

Standard library only, but for the packages in parentheses.
"""
