"""Chat templates: a sandbox to run them in, and what messages need to become to suit them."""
