"""One offline HTML page of a run, or of two side by side, from the files of the run directory.

    python -m fsdp.report RUN
    python -m fsdp.report A B --out both.html

Runs nothing from a run directory. templates/ holds the page's HTML.

    run_data        configuration, starts, checkpoints, saves
    series          metrics.jsonl as series of numbers, thinned for charts
    watch_records   verdicts, time by rank, late ranks, gradient spikes
    chart           one line chart as SVG
    sections        the sections of the page
    html, bars      parts of a page, stacked bars
    palette         names of colours
    comparison      figures and settings in which two runs differ
    __main__        the command
"""
