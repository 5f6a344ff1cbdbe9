"""Adapters for libraries that run recurrent layers in a way of their own; fastrnn itself imports nothing here."""
