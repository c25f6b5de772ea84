"""KV pool: keys and values of all rows in flight, the attention over them, and a model that runs over them."""
