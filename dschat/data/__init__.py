"""Data pipeline: from files on disk to the tensors of a step.

sources/ (files, folders, hub data sets, generated tasks) -> records (plain messages) -> chat_template/ (token ids and
loss mask) -> encoding (length limits) -> datasets (Arrow on disk; packing) -> batches (which rows form a step)
-> collators (tensors).

Nothing is imported here, so that the collators stay importable with torch alone.
"""
