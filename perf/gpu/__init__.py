"""The product on a GPU: is it correct there, does it stay within its memory plan, how far is it from the limit?"""
