"""Where rows come from: data_path (entries of --data_path: files, folders, hub data sets, generated tasks),
files (json, jsonl, parquet, csv), hub_datasets (data sets with a schema of their own), reasoning_gym (generated tasks).
"""
