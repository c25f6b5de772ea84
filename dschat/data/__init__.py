"""From files on disk to the tensors of a step.

sources (files, folders, hub names) -> records (plain messages) -> chat_template (token ids and what is trained)
-> encoding (length limits) -> datasets (Arrow on disk) -> batches (which rows make a step) -> collators (tensors).

Nothing is imported here, so that the collators stay importable with torch alone.
"""
