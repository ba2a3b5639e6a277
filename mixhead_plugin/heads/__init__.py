"""What people do with the heads of any model: weigh them, leave them out, look at them; needs torch
alone.
"""
