"""`make bench`: the article's tables, the peers, the limit and where the time goes, in one run and one file."""
