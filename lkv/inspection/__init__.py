"""What a method keeps of one text: computed for every token and head, shown as one self-contained page."""
