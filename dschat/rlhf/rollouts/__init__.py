"""From sampled responses to an Experience: model outputs, shaped scores, metrics."""
