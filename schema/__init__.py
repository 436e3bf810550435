"""The nouns of Perfledger, each declared once as data. Imports nothing of ours."""
