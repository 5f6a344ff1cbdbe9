"""Adapters for libraries that run recurrent layers in their own way; fastrnn itself imports nothing from here."""
