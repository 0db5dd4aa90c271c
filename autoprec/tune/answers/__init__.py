"""From measured trials to the answer, and what is written down of it."""
