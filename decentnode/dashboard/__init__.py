"""The dashboard: a page over runs that go on or are over, served by a process of its own that reads their files."""
