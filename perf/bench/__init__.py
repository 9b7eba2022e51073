"""`make bench`: every server under the same loads."""
