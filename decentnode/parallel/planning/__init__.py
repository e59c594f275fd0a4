"""Plans which ranks exchange in which step, and how, from a topology and a sharing rule."""
