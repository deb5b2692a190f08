"""A text compressed once and asked many times: contexts, chats, saved files, documents."""
