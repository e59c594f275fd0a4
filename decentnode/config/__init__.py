"""From YAML text to typed Configs, with the place of every value and all problems at once."""
