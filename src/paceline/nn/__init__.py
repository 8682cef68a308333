"""Modules whose parameters are rows of sparse tables, for any int64 id."""

from paceline.nn.embedding import Embedding, EmbeddingBag, Table, tables_in

__all__ = ["Embedding", "EmbeddingBag", "Table", "tables_in"]
