"""Which ranks exchange in which step, and how: of a topology and a sharing rule."""
