"""Studies in their storages: opened, shared, locked, and cleared of what dead processes left."""
