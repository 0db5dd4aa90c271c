"""Which module's forward runs now, and what its ops do."""
