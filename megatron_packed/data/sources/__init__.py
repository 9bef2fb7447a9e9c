"""Data files: JSONL, Parquet and Arrow tables, their schemas, and the cache of their tokens."""
