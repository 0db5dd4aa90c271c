"""One plan measured: its loss against fp32's on the same batches, its speed, its memory."""
