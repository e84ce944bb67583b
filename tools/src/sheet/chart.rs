//! Numbers as SVG.
//!
//! The colours are those of a light page. The style of the page maps them for a dark one.

use std::io;
use std::ops::Range;

use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, ValueFormatter};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

use crate::failure::Failure;

/// Colours, which the style of the page names again.
const INK: RGBColor = RGBColor(0x22, 0x22, 0x22);
const GRID: RGBColor = RGBColor(0xdd, 0xdd, 0xdd);
const MARK: RGBColor = RGBColor(0x0b, 0x5c, 0xad);
const PRESENT: RGBColor = RGBColor(0xb4, 0x4a, 0x00);

const SIZE: (u32, u32) = (720, 280);
const FONT_SIZE: i32 = 18;

/// Bars that fill the width, at least.
const BARS_MIN: usize = 6;

/// Most points with a dot each.
const DOTS_MAX: usize = 16;

/// An axis.
pub struct Axis<'a> {
    /// What it measures, with its unit.
    pub name: &'a str,
    /// The places with a label.
    pub places: &'a [f64],
    /// The label of a place.
    pub label: &'a dyn Fn(f64) -> String,
}

fn failed(error: &DrawingAreaErrorKind<io::Error>) -> Failure {
    Failure::environment(format!("drawing a chart: {error}"))
}

/// A range that is never empty.
fn span(values: impl Iterator<Item = f64>) -> Range<f64> {
    let finite = values.filter(|value| value.is_finite());
    let (low, high) = finite.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
        (low.min(value), high.max(value))
    });
    match low < high {
        true => low..high,
        false if low.is_finite() => low - 0.5..low + 0.5,
        false => 0.0..1.0,
    }
}

/// The marks of a chart.
#[derive(Clone, Copy)]
enum Marks<'a> {
    /// A line through points, and a ring around one.
    Line(&'a [(f64, f64)], Option<(f64, f64)>),
    /// Two lines with their names.
    Lines([(&'a str, &'a [(f64, f64)]); 2], Option<(f64, f64)>),
    /// Bars from 0 on. Bar `n` is around the place `n`.
    Bars(&'a [f64]),
}

/// A line through points, which are in order. `present` has a ring.
pub fn line(
    points: &[(f64, f64)],
    (x, y): (&Axis<'_>, &Axis<'_>),
    present: Option<(f64, f64)>,
) -> Result<String, Failure> {
    let ends = x.places.iter().copied();
    let across = span(points.iter().map(|(x, _)| *x).chain(ends));
    drawn(across, (x, y), Marks::Line(points, present)).map_err(|error| failed(&error))
}

/// Two lines, with a legend.
pub fn lines(
    named: [(&str, &[(f64, f64)]); 2],
    (x, y): (&Axis<'_>, &Axis<'_>),
    present: Option<(f64, f64)>,
) -> Result<String, Failure> {
    let points = named.iter().flat_map(|(_, points)| points.iter());
    let ends = x.places.iter().copied();
    let across = span(points.map(|(x, _)| *x).chain(ends));
    drawn(across, (x, y), Marks::Lines(named, present)).map_err(|error| failed(&error))
}

/// Bars beside each other.
pub fn bars(values: &[f64], axes: (&Axis<'_>, &Axis<'_>)) -> Result<String, Failure> {
    // A few bars are not wider than others.
    let across = -0.6..values.len().max(BARS_MIN) as f64 - 0.4;
    drawn(across, axes, Marks::Bars(values)).map_err(|error| failed(&error))
}

fn drawn(
    across: Range<f64>,
    (x, y): (&Axis<'_>, &Axis<'_>),
    marks: Marks<'_>,
) -> Result<String, DrawingAreaErrorKind<io::Error>> {
    let mut svg = String::new();
    let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
    let up = span(y.places.iter().copied());
    let mut chart = ChartBuilder::on(&root)
        .margin(12)
        .margin_right(56)
        .x_label_area_size(48)
        .y_label_area_size(96)
        .build_cartesian_2d(Placed::new(across, x), Placed::new(up, y))?;
    let font = ("sans-serif", FONT_SIZE).into_font().color(&INK);
    chart
        .configure_mesh()
        .bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .axis_style(INK)
        .label_style(font.clone())
        .axis_desc_style(font)
        .x_desc(x.name)
        .y_desc(y.name)
        .draw()?;
    match marks {
        Marks::Line(points, present) => {
            let line = LineSeries::new(points.iter().copied(), MARK.stroke_width(2));
            chart.draw_series(line)?;
            let dots = points.iter().filter(|_| points.len() <= DOTS_MAX);
            chart.draw_series(dots.map(|point| Circle::new(*point, 3, MARK.filled())))?;
            let ring = present.map(|point| Circle::new(point, 7, PRESENT.stroke_width(2)));
            chart.draw_series(ring)?;
        }
        Marks::Lines(named, present) => {
            for ((name, points), colour) in named.into_iter().zip([MARK, INK]) {
                let line = LineSeries::new(points.iter().copied(), colour.stroke_width(2));
                let drawn = chart.draw_series(line)?.label(name);
                drawn.legend(move |(x, y)| {
                    PathElement::new([(x, y), (x + 20, y)], colour.stroke_width(2))
                });
                chart.draw_series(points.iter().map(|of| Circle::new(*of, 3, colour.filled())))?;
            }
            let ring = present.map(|point| Circle::new(point, 7, PRESENT.stroke_width(2)));
            chart.draw_series(ring)?;
            let mut legend = chart.configure_series_labels();
            legend.position(SeriesLabelPosition::LowerRight);
            legend.label_font(("sans-serif", FONT_SIZE).into_font().color(&INK));
            legend.draw()?;
        }
        Marks::Bars(values) => {
            let bar = |(at, value): (usize, &f64)| {
                let at = at as f64;
                Rectangle::new([(at - 0.35, 0.0), (at + 0.35, *value)], MARK.filled())
            };
            chart.draw_series(values.iter().enumerate().map(bar))?;
        }
    }
    root.present()?;
    drop(chart);
    drop(root);
    Ok(svg)
}

/// A range with labels at chosen places.
struct Placed<'a> {
    range: RangedCoordf64,
    axis: &'a Axis<'a>,
}

impl<'a> Placed<'a> {
    fn new(range: Range<f64>, axis: &'a Axis<'a>) -> Placed<'a> {
        Placed {
            range: range.into(),
            axis,
        }
    }
}

impl Ranged for Placed<'_> {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        self.range.map(value, limit)
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.axis.places.to_vec()
    }

    fn range(&self) -> Range<f64> {
        self.range.range()
    }
}

impl ValueFormatter<f64> for Placed<'_> {
    fn format_ext(&self, value: &f64) -> String {
        (self.axis.label)(*value)
    }
}

/// Five places from 0 to a round number above `most`.
pub fn steps(most: f64) -> Vec<f64> {
    let most = if most.is_finite() && most > 0.0 {
        most
    } else {
        1.0
    };
    let unit = 10_f64.powf((most / 4.0).log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0].map(|of| of * unit);
    let step = step.into_iter().find(|step| step * 4.0 >= most);
    let step = step.unwrap_or(most / 4.0);
    (0..=4).map(|at| f64::from(at) * step).collect()
}

/// The same for bytes: multiples of powers of 1024.
pub fn byte_steps(most: f64) -> Vec<f64> {
    let most = most.max(4.0);
    let unit = 1024_f64.powf(most.log2().div_euclid(10.0));
    steps(most / unit).into_iter().map(|at| at * unit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_round_and_reach_the_largest_value() {
        assert_eq!(steps(0.0), [0.0, 0.25, 0.5, 0.75, 1.0]);
        assert_eq!(steps(100.0), [0.0, 25.0, 50.0, 75.0, 100.0]);
        assert_eq!(steps(101.0), [0.0, 50.0, 100.0, 150.0, 200.0]);
        assert_eq!(byte_steps(3000.0)[4], 4096.0);
        for most in [1.0, 7.0, 1e12, 3e-5] {
            assert!(steps(most)[4] >= most);
        }
    }

    #[test]
    fn numbers_that_are_none_draw_an_empty_chart() {
        let plain = |value: f64| format!("{value:.0}");
        let places = steps(f64::NAN);
        let axis = |name| Axis {
            name,
            places: &places,
            label: &plain,
        };
        let (x, y) = (axis("x"), axis("y"));
        for points in [&[][..], &[(1.0, 1.0)], &[(f64::NAN, f64::INFINITY)]] {
            assert!(line(points, (&x, &y), None).is_ok_and(|svg| svg.ends_with("</svg>\n")));
        }
        assert!(bars(&[], (&x, &y)).is_ok());
    }
}
