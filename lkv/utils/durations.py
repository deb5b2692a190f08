"""Format durations with rounded precision."""


def format_duration(seconds: float) -> str:
    """Format seconds in a readable unit, such as "about 10 minutes"; at least a second."""
    if seconds < 90:
        return f"about {max(1.0, seconds):.0f} s"
    return f"about {seconds / 60:.0f} minutes" if seconds < 5400 else f"about {seconds / 3600:.1f} hours"
