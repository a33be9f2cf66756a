"""Raw click logs to Parquet, streamed in bounded memory and restartable."""
