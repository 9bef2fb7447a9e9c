"""Tokenizers, chat formats, and the encoding of documents with a loss mask."""
