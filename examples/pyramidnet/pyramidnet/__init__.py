"""PyramidNet: a residual network whose width grows with every unit, on images of 32 by 32 pixels."""
