"""What every room uses: errors, phases, text, /proc, HTML, object stores, digests, private names of torch.

    errors, phases                       errors with a HINT and an exit code; phases and outcomes as values
    commands, text, units                commands, counts, lists, seconds and bytes as people read them
    stop_signals, streams                the signals that stop a run; stdout and stderr that print any text
    proc, cgroup                         files of /proc; the memory limit of the process's cgroup
    regular_file                         files that may be anyone's, read within a size; no FIFOs
    cache_folder, checked_values         the folder of what can be made again; checks of a file's values
    garbage, weak_method                 garbage collection paused; a method that does not keep its object
    object_client                        the client of object stores (fsspec, imported by its first use)
    devices, worker_thread               figures of devices; a thread for the jobs of an object (torch)
    digest, dtypes, torchvision_import   digests of tensors, names of dtypes, import of torchvision (torch)
    torch_private                        every use of a private name of torch; a folder (torch)

Standard library only, but for the packages in parentheses.
"""
