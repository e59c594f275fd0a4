"""The files of a run: its folder, what its nodes write there, and what people ask of it by files."""
