"""The dashboard: a web page about runs in progress or ended, served by a separate process that reads their files."""
