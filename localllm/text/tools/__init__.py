"""Tool calls: how models write them, as data that is both a grammar and a parser."""
