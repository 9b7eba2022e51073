"""`make capacity`: how many replicas a number of users takes, by a queue that is checked against two real servers."""
