"""Any table to a prepared directory: types found or given, streamed, restartable."""
