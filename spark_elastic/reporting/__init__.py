"""What is shown of something that takes long: a bar in a terminal or a notebook, lines where neither is."""
