"""A server under mixed load for minutes to hours: does memory stay flat, is everything answered and counted?"""
