"""Time against error of many configurations on captured heads."""
