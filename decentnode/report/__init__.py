"""Reports about runs: text lines, tables, plots, an HTML page and a trace, all from the files in run folders."""
