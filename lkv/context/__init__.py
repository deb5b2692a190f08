"""Contexts: texts that are compressed once and queried many times, with chats, saved files and document readers."""
