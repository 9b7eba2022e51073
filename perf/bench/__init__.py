"""`make bench`: the article's tables, the baselines, the roofline and where the time goes, in one run and one file."""
