"""Prepare a corpus offline: text, JSON lines, parquet or token ids to a token store."""
