"""Lightning's own Trainer on real gloo ranks, `strategy="dear"` beside `DDPStrategy`."""
