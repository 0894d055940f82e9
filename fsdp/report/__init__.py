"""One offline HTML page of a run, or of two side by side, from the files of the run directory.

    python -m fsdp.report RUN
    python -m fsdp.report A B --out both.html

Runs nothing from a run directory. templates/ holds the page's HTML.

    __main__    the command
    run_data    reads the files: configuration, numbers, starts, checkpoints, the watch's records
    page        the sections of the page, differences of two runs
    chart       templates, one line chart as SVG, stacked bars
"""
