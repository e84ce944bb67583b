//! The time of a listing, which a seed does not reach.

use super::*;
use node::REFRESH;

#[test]
fn a_listing_takes_an_hour_at_most_and_each_part_its_own_time() {
    let world = World::new(Setup::default());
    let mut dice = Dice::new(1);
    let machine = Machine::new(dice.fork(), Odds::default(), false);
    let plan = Plan::draw(&mut dice);
    plan.create(&machine);
    let service = Arc::new(Mutex::new(Service::new(dice.fork())));
    let main = world.spawn(world.process("a node"), "main", move || {
        // The names of the next listing, a second for each part of ten.
        let keep = |from: usize, runs: usize, part_takes: u64| {
            let service = &mut *service.lock();
            let runs = (from..from + runs).map(|chain| (name(chain, 0), Vec::new()));
            service.objects = runs.collect();
            service.part_takes = Duration::from_secs(part_takes);
        };
        keep(0, 1000, 1);
        let node = Node::open(&service, 0, &plan);
        let after = |time: Duration| {
            thread::sleep(time);
            let counts = node.counts();
            (counts["listings"], counts["known_runs"])
        };
        assert_eq!(after(Duration::from_secs(98)).0, 0);
        assert_eq!(after(Duration::from_secs(5)), (1, 1000));
        // It is stopped, so that nothing is forgotten.
        keep(1000, 40_000, 1);
        let (listings, known) = after(REFRESH + Duration::from_mins(59));
        assert!(listings == 1 && known > 36_000);
        let (listings, known) = after(Duration::from_mins(2));
        assert!(listings == 1 && known < 38_000);
        // The listing in progress ends, and another one follows.
        keep(1000, 10, 0);
        assert_eq!(after(2 * REFRESH), (3, 10));
        // A part that takes longer than a request may.
        keep(1000, 10, 3);
        assert_eq!(after(2 * REFRESH), (3, 10));
    });
    while !main.is_finished() {
        machine.settle();
        assert!(world.step() == Step::Ran, "{}", world.report());
    }
}
